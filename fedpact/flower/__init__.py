"""A federation over Flower: a server, and nodes that keep their rows.

    described   what everyone knows of everyone's data, and the experiment made of it
    agreement   how that is agreed on: columns, categories, classes, scaling, by messages
    node        what a client does with its rows and its state
    vertical    data split by features: what a party does with its columns, its labels and its keys
    joined      files of such parties, joined by ids that nobody shows
    resident    the node's process, which outlives Flower's one process a message
    warm        how Flower's process for a message starts in a moment
    client      the ClientApp: hands messages to the resident
    server      the ServerApp: waits for the nodes, agrees, runs the experiment
    links       how the engine's questions reach nodes: by Flower's grid, or in one process
    masked      sums that the server learns without the summands, over a link
    coding      what numbers become for that
    local       a federation on this machine, with certificates and keys made on the spot

Nothing here is known to algorithms or to the round loop; the engines are `engines.flower` and, for columns,
`engines.parties`.
"""
