r"""Secure aggregation: the server learns the sum of the sites' uploads, and nothing else of any of them.

The protocol is SecAgg+ (Bell et al., Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, CCS 2020, after
Bonawitz et al., 2017), once in every round, for whole numbers :math:`x_i` modulo :math:`2^b`:

1. *keys*: every site makes two pairs of keys and sends the public halves. Each has some sites as neighbours.
2. *shares*: a site gets its neighbours' public keys. It divides a secret seed :math:`b_i` and its first private key
   into shares, one for itself and one for each neighbour, and sends them sealed, for the server to relay.
3. *masked*: with the shares of its neighbours, a site sends :math:`y_i = x_i + m(b_i) + \sum_{j > i} m(s_{ij}) -
   \sum_{j < i} m(s_{ij})`, where :math:`s_{ij}` is the key on which both agree and :math:`m` stretches a key to
   random numbers. What neighbours have in common vanishes from the sum.
4. *unmask*: the sites are told who has sent such a vector, and who has not. Of the former they give the server their
   shares of :math:`b_i`, of the latter those of the private key, and never both of one site. With these it removes
   the masks that are left.

(Flower has the same protocol, for its older interface, with masks from a generator that is seeded with 32 bits.)

    primitives.py   secrets in shares, keys on which two sites agree, masks, sealed messages
    masking.py      the four steps as pure functions: what a site does, and what the server computes
    sums.py         uploads as whole numbers, and the mean that comes out
    site.py         a site's part: secrets on its disk, each step answered once
    server.py       the server's part: it relays, adds up, and has the sum unmasked
    rounds.py       rounds whose uploads are added up in this way

All but ``sums.py`` needs the package ``cryptography``, which the extra ``flower`` brings; so they are imported only in
runs with secure aggregation.
"""
