//! One server, two clients, one lock: messages that are lost and delayed, clients that pause,
//! leases that end. All clocks go at the same rate, in steps.

use stateright::{Model, Property};

/// The lease, in steps of time.
const LEASE: u8 = 2;
/// The last step of time.
const END: u8 = 4;
/// The acquisitions of each client, each with a token of its own (rule 1).
const ACQUISITIONS: [u8; 2] = [2, 1];

/// What can be switched off.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The resource refuses a write with a smaller fencing token than that of an earlier write.
    pub fencing: bool,
    /// Rule 2: validity counts from the time before the request was sent.
    pub counts_from_request: bool,
    /// Rule 14: a release compares the token.
    pub compares_token: bool,
}

impl Rules {
    /// All rules.
    pub const ALL: Self = Self {
        fencing: true,
        counts_from_request: true,
        compares_token: true,
    };
}

/// An acquisition: the client, and which of its acquisitions it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u8, u8);

/// A message on its way. It may be delayed for as long as the model lasts, and so be lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Message {
    /// To the server, with the deadline (rule 7).
    Acquire(Token, u8),
    /// To the client: the fencing token, and the rest of the lease.
    Granted(Token, u8, u8),
    /// To the server.
    Release(Token),
    /// To the resource, with the fencing token.
    Write(Token, u8),
}

/// A client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Client {
    /// It has made this many acquisitions.
    Idle(u8),
    /// It asked at this time.
    Asks(Token, u8),
    /// It relies on its lock, with this fencing token, until this time.
    Holds(Token, u8, u8),
}

/// A step of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Time goes on.
    Tick,
    /// The client asks for the lock (rule 7).
    Ask(usize),
    /// The client gives up (rule 8), or has lost the lock (rule 9), or is done (rules 13 and 14).
    End(usize),
    /// The holder looks at its validity, and sends a write.
    Write(usize),
    /// The message arrives: at the server (rules 2, 14 and 27), at the client (rule 2) or at the
    /// resource.
    Deliver(Message),
}

/// The state of the server, the clients, the resource and the network.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    /// The holder at the server, and the end of its lease.
    lock: Option<(Token, u8)>,
    /// The latest fencing token.
    fence: u8,
    clients: [Client; 2],
    /// The fencing tokens of the accepted writes.
    written: Vec<u8>,
    network: Vec<Message>,
}

impl State {
    fn send(&mut self, message: Message) {
        let place = self.network.partition_point(|other| *other < message);
        self.network.insert(place, message);
    }

    fn receive(&mut self, message: Message) {
        let place = self.network.iter().position(|other| *other == message);
        self.network.remove(place.expect("it is on its way"));
    }

    fn holders(&self) -> usize {
        let holds =
            |client: &&Client| matches!(client, Client::Holds(.., until) if self.now < *until);
        self.clients.iter().filter(holds).count()
    }
}

impl Model for Rules {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            now: 0,
            lock: None,
            fence: 0,
            clients: [Client::Idle(0); 2],
            written: Vec::new(),
            network: Vec::new(),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < END {
            actions.push(Action::Tick);
        }
        for (number, client) in state.clients.iter().enumerate() {
            match client {
                Client::Idle(made) if *made < ACQUISITIONS[number] => {
                    actions.push(Action::Ask(number))
                }
                Client::Idle(_) => {}
                Client::Asks(..) => actions.push(Action::End(number)),
                Client::Holds(token, fence, until) => {
                    actions.push(Action::End(number));
                    let write = Message::Write(*token, *fence);
                    let has_written =
                        state.network.contains(&write) || state.written.contains(fence);
                    if state.now < *until && !has_written {
                        actions.push(Action::Write(number));
                    }
                }
            }
        }
        let mut network = state.network.clone();
        network.dedup();
        actions.extend(network.into_iter().map(Action::Deliver));
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        let now = state.now;
        match action {
            Action::Tick => state.now += 1,
            Action::Ask(number) => {
                let Client::Idle(made) = state.clients[number] else {
                    return None;
                };
                let token = Token(number as u8, made);
                state.clients[number] = Client::Asks(token, now);
                state.send(Message::Acquire(token, now + 1));
            }
            Action::End(number) => {
                let (Client::Asks(token, _) | Client::Holds(token, ..)) = state.clients[number]
                else {
                    return None;
                };
                state.clients[number] = Client::Idle(token.1 + 1);
                state.send(Message::Release(token));
            }
            Action::Write(number) => {
                let Client::Holds(token, fence, _) = state.clients[number] else {
                    return None;
                };
                state.send(Message::Write(token, fence));
            }
            Action::Deliver(message) => {
                state.receive(message);
                match message {
                    Message::Acquire(token, deadline) => {
                        let is_free = state.lock.is_none_or(|(_, ends)| ends <= now);
                        if now > deadline || !is_free {
                            return Some(state);
                        }
                        state.lock = Some((token, now + LEASE));
                        state.fence += 1;
                        state.send(Message::Granted(token, state.fence, LEASE));
                    }
                    Message::Granted(token, fence, lease) => {
                        let client = &mut state.clients[usize::from(token.0)];
                        // Rule 1: a reply to an acquisition that was given up counts for nothing.
                        if let Client::Asks(asked, since) = *client
                            && asked == token
                        {
                            let from = if self.counts_from_request { since } else { now };
                            *client = Client::Holds(token, fence, from + lease);
                        }
                    }
                    Message::Release(token) => {
                        let is_its = |(holder, _)| holder == token || !self.compares_token;
                        if state.lock.is_some_and(is_its) {
                            state.lock = None;
                        }
                    }
                    Message::Write(_, fence) => {
                        let is_stale = state.written.last().is_some_and(|last| *last > fence);
                        if !(self.fencing && is_stale) {
                            state.written.push(fence);
                        }
                    }
                }
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("one holder", |_, state: &State| state.holders() <= 1),
            Property::always("writes in the order of grants", |_, state: &State| {
                state.written.is_sorted()
            }),
            Property::sometimes("both clients write", |_, state: &State| {
                state.written.len() == 2
            }),
            Property::sometimes("a lease ends under a holder", |_, state: &State| {
                let is_late = |client: &Client| matches!(client, Client::Holds(.., until) if *until <= state.now);
                state.clients.iter().any(is_late)
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
    fn fenced_writes_are_in_the_order_of_grants() {
        let found = search(Rules::ALL);
        println!("{} states", found.unique_state_count());
        found.assert_properties();
    }

    /// The schedule of Kleppmann's article: a holder pauses between its look and its write.
    #[test]
    fn writes_without_fencing_are_not() {
        let found = search(Rules {
            fencing: false,
            ..Rules::ALL
        });
        found.assert_no_discovery("one holder");
        let (one, other) = (Token(0, 0), Token(1, 0));
        found.assert_discovery(
            "writes in the order of grants",
            vec![
                Action::Ask(0),
                Action::Deliver(Message::Acquire(one, 1)),
                Action::Deliver(Message::Granted(one, 1, LEASE)),
                Action::Write(0),
                Action::Tick,
                Action::Tick,
                Action::Ask(1),
                Action::Deliver(Message::Acquire(other, 3)),
                Action::Deliver(Message::Granted(other, 2, LEASE)),
                Action::Write(1),
                Action::Deliver(Message::Write(other, 2)),
                Action::Deliver(Message::Write(one, 1)),
            ],
        );
    }

    #[test]
    fn validity_from_the_reply_makes_two_holders() {
        let found = search(Rules {
            counts_from_request: false,
            ..Rules::ALL
        });
        found.assert_any_discovery("one holder");
    }

    #[test]
    fn a_release_that_compares_nothing_makes_two_holders() {
        let found = search(Rules {
            compares_token: false,
            ..Rules::ALL
        });
        found.assert_any_discovery("one holder");
    }
}
