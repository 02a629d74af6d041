"""The paper's tables and plots, measured again and put beside the published values."""
