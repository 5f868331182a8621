"""Input on the host: the batch of a step is a pure function of the data, the seed and the step.

    sources        `text_files`, `tfrecords`, `array_records`, `tfds`, or texts in memory
    → tokenizers   `tokenizers`, `characters`, `sentence_piece`, `words`
    → tokens       `token_rows`: of one or several sides of each row; `token_cache`, `columns`
    → batches      `input`, `row_inputs`; `sides`, `shuffle`, `packing`, `bucketing`, `mixtures`
    → `prefetch`

`arrays` makes batches from arrays in memory.
"""
