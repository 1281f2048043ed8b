"""Files that repeat a run without this package: a run card carries them as they are, and the trainer uses them too."""
