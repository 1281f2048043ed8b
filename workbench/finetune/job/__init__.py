"""The job `FineTune`: the checks between its options, its rows and its DeepSpeed JSON."""
