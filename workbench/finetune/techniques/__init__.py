"""Techniques: how a training state is spread over the ranks. One file each, and `registry` names them all."""
