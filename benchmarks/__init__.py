"""`forebay bench` and `forebay demo`: figures and proofs, from real servers and real peers."""
