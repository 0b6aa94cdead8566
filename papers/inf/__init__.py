"""INF: the sparse information form of Laplace approximations (Lee, Humt, Feng, Triebel 2020)."""
