"""Scripts that run in the interpreters of other engines and import nothing of this one."""
