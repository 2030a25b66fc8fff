"""``glowplug ablate``: techniques on and off, a fresh engine for each row of a table.

``command`` has the options, ``techniques`` the columns, ``rows`` the rows to measure. ``runner``
runs each row in a process of its own, which is ``measure``. ``record`` keeps the results, and
``tables`` prints them.
"""
