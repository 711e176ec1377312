"""`forebay demo`: a real training job, killed and resumed, with proof that nothing was lost."""
