"""Parts of the methods that load torch and TRL. Only pods import these modules."""
