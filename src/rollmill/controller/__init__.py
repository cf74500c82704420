"""The shell around the scheduling core: it obeys instructions and reports events; it decides nothing."""
