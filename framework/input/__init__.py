"""Host-side input: the batch of step s is a pure function of data, seed and s.

sources (`text_files`, `tfrecords`, `tfds`, in memory) → `tokenizers` (`characters`,
`sentence_piece`, `words`) → an `input`: batches by step, by way of `shuffle`, `packing`,
`bucketing`, `mixtures` → `prefetch`. Data that is in memory as arrays becomes batches in `arrays`.
"""
