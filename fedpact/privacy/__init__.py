"""Privacy that holds."""
