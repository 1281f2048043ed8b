"""Forms of rows: the columns of each form, the turns of chats, and all that is asked."""
