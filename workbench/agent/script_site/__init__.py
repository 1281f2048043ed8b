"""The folder of the first import of Python in ranks of scripts: `sitecustomize`."""
