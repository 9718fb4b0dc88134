"""Branch replay: the gradient of a group that shares a prompt, without running the prompt once per branch."""
