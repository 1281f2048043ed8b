"""The runs below a folder: found, told apart, and indexed for questions over thousands of them."""
