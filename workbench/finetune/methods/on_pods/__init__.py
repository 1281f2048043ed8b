"""Parts of the methods with torch and TRL. Only pods import the modules."""
