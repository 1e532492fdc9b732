"""The embedded mode: everything on one machine, supervised. Used through its program, `shoal`."""
