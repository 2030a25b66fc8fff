"""The tier of the prefix cache on one rank."""
