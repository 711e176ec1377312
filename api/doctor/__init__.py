"""`forebay doctor`: what on this node would slow or break a training job, and what to change."""
