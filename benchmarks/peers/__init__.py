"""Other people's clients, each used as its documentation says, beside ours."""
