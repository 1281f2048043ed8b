"""The folder of the `sitecustomize` for ranks of scripts, which Python imports first."""
