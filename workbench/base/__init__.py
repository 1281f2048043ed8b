"""General pieces without knowledge of the subject. Standard library only, no other room."""
