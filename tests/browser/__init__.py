"""The product in a real browser. A package, so that its files share a JupyterLab."""
