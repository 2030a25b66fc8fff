"""The page at ``/``: its files and the route that it polls."""
