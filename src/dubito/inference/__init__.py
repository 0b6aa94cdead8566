"""One room per method; rooms never import each other, except the point estimate others start from."""
