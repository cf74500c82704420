"""Many replicas behind one address: which one gets a request, and what happens when one is lost."""
