"""Packages that a job needs besides the pod's: read, checked and written as pip reads them."""
