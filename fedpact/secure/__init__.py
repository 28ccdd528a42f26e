"""Protocols that keep what one party holds from the others."""
