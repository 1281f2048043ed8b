"""Packages of a job besides the pod's: read, checked and written for pip."""
