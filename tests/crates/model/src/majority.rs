//! Three servers, two clients, one lock: which number the holder of a majority has.
//!
//! Time is left out: the vote for an acquisition that has ended ends at any time later (its
//! release, its abandonment, or its lease, rules 8 and 14), and no vote ends before. What is left
//! are the numbers (rule 28) and the count (a majority).

use stateright::{Model, Property};

const SERVERS: usize = 3;

/// What can be switched off.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The votes that a holder needs.
    pub votes: usize,
    /// Rule 28: the number of a grant is known to a majority before the client enters.
    pub writes_back: bool,
    /// Rule 28: a server keeps and answers the larger of its next number and the proposal.
    pub proposes: bool,
}

impl Rules {
    /// All rules.
    pub const ALL: Self = Self {
        votes: SERVERS / 2 + 1,
        writes_back: true,
        proposes: true,
    };

    /// Redlock as it is described: a majority, and a number of each server.
    pub const REDLOCK: Self = Self {
        writes_back: false,
        proposes: false,
        ..Self::ALL
    };
}

/// The acquisitions, one of each client.
const ACQUISITIONS: usize = 2;

/// A server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Server {
    /// The acquisition that has its vote.
    vote: Option<usize>,
    /// The latest number.
    number: u8,
}

/// What a client knows of its acquisition at a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Vote {
    /// No reply.
    #[default]
    Unknown,
    /// The vote, with this number.
    Has(u8),
}

/// An acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Acquisition {
    /// It has not begun.
    Waits,
    /// It asks the servers.
    Asks([Vote; SERVERS]),
    /// It has this number, and writes it back. The servers that know it.
    Raises(u8, [Vote; SERVERS]),
    /// It holds the lock with this number.
    Holds(u8),
    /// It is over.
    Ended,
}

/// A message on its way, of an acquisition at a server. It may be delayed for as long as the model
/// lasts, and so be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// To the server, with a proposal (rule 28).
    Ask(u8),
    /// To the server (rule 28).
    Raise(u8),
    /// To the client: the number.
    Voted(u8),
}

/// A step of the model. The first number is that of the acquisition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The client asks all servers.
    Begin(usize),
    /// The client has a majority, and decides the number (rule 28).
    Decide(usize),
    /// The client gives up, loses the lock or releases it.
    End(usize),
    /// The vote of the server for an acquisition that is over ends.
    Forget(usize),
    /// The message arrives.
    Deliver(usize, usize, Message),
}

/// The state of the servers, the acquisitions and the network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    servers: [Server; SERVERS],
    acquisitions: [Acquisition; ACQUISITIONS],
    /// The largest number that each client has seen.
    seen: [u8; ACQUISITIONS],
    /// The numbers of the grants, in their order.
    granted: Vec<u8>,
    network: Vec<(usize, usize, Message)>,
}

impl State {
    fn send(&mut self, acquisition: usize, server: usize, message: Message) {
        let letter = (acquisition, server, message);
        let place = self.network.partition_point(|other| *other < letter);
        self.network.insert(place, letter);
    }

    /// The acquisition is over, or enters with a number.
    fn enter(&mut self, acquisition: usize, number: u8) {
        self.acquisitions[acquisition] = Acquisition::Holds(number);
        self.granted.push(number);
    }

    /// The servers that know the number count for it: those that have given it, and those whose
    /// number has passed it, as nothing else is granted while a majority keeps the lock.
    fn known(votes: &[Vote; SERVERS], number: u8) -> usize {
        let knows = |vote: &&Vote| matches!(vote, Vote::Has(its) if *its >= number);
        votes.iter().filter(knows).count()
    }
}

impl Model for Rules {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        // One server knows of an attempt that the others do not know of.
        let mut servers = [Server::default(); SERVERS];
        servers[0].number = 1;
        vec![State {
            servers,
            acquisitions: [Acquisition::Waits; ACQUISITIONS],
            seen: [0; ACQUISITIONS],
            granted: Vec::new(),
            network: Vec::new(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (number, acquisition) in state.acquisitions.iter().enumerate() {
            match acquisition {
                Acquisition::Waits => actions.push(Action::Begin(number)),
                Acquisition::Asks(votes) => {
                    actions.push(Action::End(number));
                    if State::known(votes, 0) >= self.votes {
                        actions.push(Action::Decide(number));
                    }
                }
                Acquisition::Raises(..) | Acquisition::Holds(_) => {
                    actions.push(Action::End(number));
                }
                Acquisition::Ended => {}
            }
        }
        for (number, server) in state.servers.iter().enumerate() {
            let is_over = |it: usize| state.acquisitions[it] == Acquisition::Ended;
            if server.vote.is_some_and(is_over) {
                actions.push(Action::Forget(number));
            }
        }
        for (acquisition, server, message) in &state.network {
            actions.push(Action::Deliver(*acquisition, *server, *message));
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        match action {
            Action::Begin(it) => {
                state.acquisitions[it] = Acquisition::Asks(Default::default());
                let proposal = if self.proposes { state.seen[it] + 1 } else { 0 };
                for server in 0..SERVERS {
                    state.send(it, server, Message::Ask(proposal));
                }
            }
            Action::Decide(it) => {
                let Acquisition::Asks(votes) = state.acquisitions[it] else {
                    return None;
                };
                let numbers = votes.iter().filter_map(|vote| match vote {
                    Vote::Has(number) => Some(*number),
                    Vote::Unknown => None,
                });
                let number = numbers.max()?;
                if !self.writes_back || State::known(&votes, number) >= self.votes {
                    state.enter(it, number);
                } else {
                    state.acquisitions[it] = Acquisition::Raises(number, votes);
                    for (server, vote) in votes.iter().enumerate() {
                        if matches!(vote, Vote::Has(its) if *its < number) {
                            state.send(it, server, Message::Raise(number));
                        }
                    }
                }
            }
            Action::End(it) => {
                state.acquisitions[it] = Acquisition::Ended;
                // Rule 1: no message for it counts any more. At the servers they do.
                state
                    .network
                    .retain(|(of, _, message)| *of != it || !matches!(message, Message::Voted(_)));
            }
            Action::Forget(server) => state.servers[server].vote = None,
            Action::Deliver(it, number, message) => {
                state
                    .network
                    .retain(|other| *other != (it, number, message));
                let server = &mut state.servers[number];
                match message {
                    Message::Ask(proposal) => {
                        if server.vote.is_none() {
                            server.vote = Some(it);
                            server.number = proposal.max(server.number + 1);
                            let reply = Message::Voted(server.number);
                            state.send(it, number, reply);
                        }
                    }
                    Message::Raise(raised) => {
                        if server.vote == Some(it) {
                            server.number = server.number.max(raised);
                            let reply = Message::Voted(server.number);
                            state.send(it, number, reply);
                        }
                    }
                    Message::Voted(voted) => {
                        let seen = &mut state.seen[it];
                        *seen = voted.max(*seen);
                        match &mut state.acquisitions[it] {
                            Acquisition::Asks(votes) => votes[number] = Vote::Has(voted),
                            Acquisition::Raises(token, votes) => {
                                votes[number] = Vote::Has(voted);
                                let token = *token;
                                if State::known(votes, token) >= self.votes {
                                    state.enter(it, token);
                                }
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
        (state != *last).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one holder", |_, state: &State| {
                let holds = |it: &&Acquisition| matches!(it, Acquisition::Holds(_));
                state.acquisitions.iter().filter(holds).count() <= 1
            }),
            Property::always("numbers increase", |_, state: &State| {
                state.granted.is_sorted_by(|one, next| one < next)
            }),
            Property::sometimes("both enter", |_, state: &State| state.granted.len() == 2),
            Property::sometimes("a number is written back", |_, state: &State| {
                let raises = |it: &Acquisition| matches!(it, Acquisition::Raises(..));
                state.acquisitions.iter().any(raises)
            }),
        ]
    }
}

#[cfg(test)]
mod tests {
    use stateright::{Checker as _, Model as _};

    use super::*;

    fn search(rules: Rules) -> impl stateright::Checker<Rules> {
        rules.checker().spawn_bfs().join()
    }

    #[test]
    fn numbers_that_a_majority_knows_increase() {
        let found = search(Rules::ALL);
        println!("{} states", found.unique_state_count());
        found.assert_properties();
    }

    #[test]
    fn proposals_are_not_what_makes_them_increase() {
        let found = search(Rules {
            proposes: false,
            ..Rules::ALL
        });
        println!("{} states", found.unique_state_count());
        found.assert_properties();
    }

    /// One server knows the largest number, and is not in the next majority.
    #[test]
    fn the_numbers_of_redlock_go_back() {
        let found = search(Rules::REDLOCK);
        let vote = |of, server, number| {
            [
                Action::Deliver(of, server, Message::Ask(0)),
                Action::Deliver(of, server, Message::Voted(number)),
            ]
        };
        let mut schedule = vec![Action::Begin(0)];
        schedule.extend(vote(0, 0, 2).into_iter().chain(vote(0, 1, 1)));
        schedule.extend([Action::Decide(0), Action::End(0), Action::Forget(1)]);
        schedule.push(Action::Begin(1));
        schedule.extend(vote(1, 1, 2).into_iter().chain(vote(1, 2, 1)));
        schedule.push(Action::Decide(1));
        found.assert_discovery("numbers increase", schedule);
    }

    #[test]
    fn proposals_alone_do_not_help() {
        let found = search(Rules {
            writes_back: false,
            ..Rules::ALL
        });
        found.assert_any_discovery("numbers increase");
    }

    #[test]
    fn one_vote_fewer_makes_two_holders() {
        let found = search(Rules {
            votes: 1,
            ..Rules::ALL
        });
        found.assert_any_discovery("one holder");
    }
}
