"""Where workers report themselves, each with a proof that it belongs to the cluster."""
