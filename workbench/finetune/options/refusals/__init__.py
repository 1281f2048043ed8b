"""Why a job is refused, by option. `finetune/job/refusals.py` has the list."""
