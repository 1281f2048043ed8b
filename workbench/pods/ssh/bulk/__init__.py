"""Large files over OpenSSH: resumed where a break left them, verified on both sides."""
