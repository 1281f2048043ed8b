"""Offload of ZeRO-3 to the disks of the pods (NVMe)."""
