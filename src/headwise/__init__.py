"""Multi-head attention, head by head."""
