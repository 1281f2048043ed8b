"""What techniques do on pods: modules that load torch. Only functions import them."""
