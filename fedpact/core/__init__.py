"""The contract, the round loop and what they stand on. Imports nothing else of fedpact."""
