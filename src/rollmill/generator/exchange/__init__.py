"""Many requests over one call of gRPC: what a call costs is paid once, and a message carries what there is to say."""
