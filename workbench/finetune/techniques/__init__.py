"""Techniques: how a training state is spread over the ranks. `registry` lists the techniques."""
