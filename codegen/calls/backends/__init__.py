"""How collectives are written, one module per communication library."""
