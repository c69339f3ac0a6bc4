"""How collectives are written: one module for each communication library."""
