//! The acquisitions that have ended recently. A release may still name them as its heir.

use std::collections::{HashMap, VecDeque};

use foldhash::fast::RandomState;

use super::{
    PerServer,
    round::{Passed, Pushed, Round},
};
use crate::{guard::fence::FencingToken, store::Token};

/// The number of acquisitions to remember.
const MANY: usize = 1_024;

/// The latest acquisitions that have ended, by the stems of their tokens.
#[derive(Debug, Default)]
pub(super) struct Ended {
    acquisitions: HashMap<u128, Acquisition, RandomState>,
    order: VecDeque<u128>,
}

#[derive(Debug)]
struct Acquisition {
    name: Option<Token>,
    passed: PerServer<Passed>,
}

impl Ended {
    /// Adds an acquisition that a release may name.
    pub(super) fn insert(&mut self, stem: u128, round: Round) {
        if !round.may_be_named() {
            return;
        }
        let (name, passed) = round.into_passed();
        let acquisition = Acquisition { name, passed };
        if self.acquisitions.insert(stem, acquisition).is_none() {
            if self.order.len() == MANY
                && let Some(oldest) = self.order.pop_front()
            {
                self.acquisitions.remove(&oldest);
            }
            self.order.push_back(stem);
        }
    }

    /// Applies a push message. Returns `None` for an acquisition that is not known here.
    pub(super) fn pushed(
        &mut self,
        alias: Token,
        server: usize,
        fence: FencingToken,
    ) -> Option<Pushed> {
        let acquisition = self.acquisitions.get_mut(&alias.stem())?;
        if acquisition.name != Some(alias) {
            return Some(Pushed::Unwanted);
        }
        Some(acquisition.passed[server].pushed_late(fence))
    }

    /// Records the reply to a release at a server. Returns whether the alias has to
    /// be abandoned.
    pub(super) fn released(&mut self, alias: Token, server: usize, is_released: bool) -> bool {
        let acquisition = self.acquisitions.get_mut(&alias.stem());
        let acquisition = acquisition.filter(|it| it.name == Some(alias));
        acquisition.is_some_and(|it| it.passed[server].released(is_released))
    }
}
