"""DeepSpeed Workbench: fine-tune over several pods without leaving the notebook."""
