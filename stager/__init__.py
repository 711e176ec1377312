"""stagerd: brings shards onto this node, keeps them as long as they are of use, hands them out."""
