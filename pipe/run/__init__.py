"""The engine: one state machine per rank, and a driver that carries out what it says."""
