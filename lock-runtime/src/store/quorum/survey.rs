//! Requests to several servers at once, and how long to wait for their replies.

use std::{pin::pin, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, future::BoxFuture};
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    Inner, answer_timeout,
    background::{Background, UnderWay},
    campaign::grace,
    node::Node,
    tally,
};
use crate::{
    key::LockKey,
    spec::{LockKind, MAX_LEASE},
    store::{Inspection, RevokeReply, RevokeScope, StoreError},
};

impl Inner {
    /// Sends requests to servers and waits until `decided` returns `true`, all have replied, or the
    /// time is up. Requests that are no longer awaited complete in the background. Once decided,
    /// waits a little longer for `line`. Returns the errors of the servers that failed to reply,
    /// each with the index of its server.
    pub(super) async fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        line: Option<usize>,
        questions: impl IntoIterator<Item = (usize, BoxFuture<'static, Result<T, StoreError>>)>,
        mut decided: impl FnMut(usize, T) -> bool,
    ) -> Vec<(usize, StoreError)> {
        let (answer, mut answers) = mpsc::unbounded_channel();
        let mut calling = Calling {
            background: &self.background,
            calls: UnderWay::new(),
        };
        let mut awaited = Vec::with_capacity(self.nodes.len());
        for (index, question) in questions {
            awaited.push(index);
            let (node, answer) = (self.nodes[index].clone(), answer.clone());
            calling.calls.push(Box::pin(async move {
                let result = question.await;
                node.note(&result, Instant::now());
                drop(answer.send((index, result)));
            }));
        }
        let mut failed = Vec::new();
        let begun = Instant::now();
        let mut until = begun + patience;
        let mut is_decided = false;
        let mut alarm = pin!(sleep_until(until));
        while !(awaited.is_empty()
            || is_decided && line.is_none_or(|line| !awaited.contains(&line)))
        {
            if alarm.deadline() != until {
                alarm.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                Some(()) = calling.calls.next() => {}
                () = &mut alarm => break,
            }
            while let Ok((index, result)) = answers.try_recv() {
                awaited.retain(|awaited| *awaited != index);
                match result {
                    Ok(value) if !is_decided => {
                        if decided(index, value) {
                            is_decided = true;
                            until = until.min(Instant::now() + grace(begun.elapsed()));
                        }
                    }
                    Ok(_) => {}
                    Err(error) => failed.push((index, error)),
                }
            }
        }
        if !is_decided {
            let error = StoreError::timed_out(patience);
            awaited
                .iter()
                .for_each(|index| self.nodes[*index].rest(error.clone(), Instant::now()));
            failed.extend(awaited.into_iter().map(|index| (index, error.clone())));
        }
        failed
    }

    /// The error if too few servers have replied, like `unreachable`.
    pub(super) fn unanswered(&self, failed: &[(usize, StoreError)]) -> StoreError {
        let kinds: Vec<_> = failed.iter().map(|(_, error)| error.kind()).collect();
        let said = (0..self.nodes.len()).map(|index| {
            let said = failed.iter().find(|(failed, _)| *failed == index);
            let said =
                said.map_or_else(|| "has answered".to_owned(), |(_, error)| error.to_string());
            format!("{}: {said}", self.nodes[index])
        });
        self.too_few(said.collect(), &kinds)
    }

    /// Sends the same request to every server.
    pub(super) async fn survey<T: Send + 'static>(
        &self,
        question: impl Fn(Arc<Node>) -> BoxFuture<'static, Result<T, StoreError>>,
    ) -> (Vec<T>, Vec<(usize, StoreError)>) {
        let mut answers = Vec::with_capacity(self.nodes.len());
        let questions: Vec<_> = self
            .nodes
            .iter()
            .cloned()
            .map(question)
            .enumerate()
            .collect();
        let failed = self
            .ask(answer_timeout(MAX_LEASE), None, questions, |_, answer| {
                answers.push(answer);
                false
            })
            .await;
        (answers, failed)
    }

    pub(super) async fn inspect(
        &self,
        key: &LockKey,
        kind: LockKind,
    ) -> Result<Inspection, StoreError> {
        let question = |node: Arc<Node>| -> BoxFuture<'static, _> {
            let key = key.clone();
            Box::pin(async move { node.store.inspect(&key, kind).await })
        };
        let (seen, failed) = self.survey(question).await;
        if seen.len() < self.majority() {
            return Err(self.unanswered(&failed));
        }
        Ok(tally::inspected(self.nodes.len(), seen))
    }

    pub(super) async fn revoke(
        &self,
        key: &LockKey,
        kind: LockKind,
        scope: RevokeScope,
    ) -> Result<RevokeReply, StoreError> {
        let question = |node: Arc<Node>| -> BoxFuture<'static, _> {
            let key = key.clone();
            Box::pin(async move { node.store.revoke(&key, kind, scope).await })
        };
        let (replies, failed) = self.survey(question).await;
        tally::revoked(self.nodes.len(), &replies).ok_or_else(|| self.unanswered(&failed))
    }
}

/// Calls in progress. If dropped, they complete in the background, because their replies show the
/// state of the servers.
pub(super) struct Calling<'a> {
    pub(super) background: &'a Arc<Background>,
    pub(super) calls: UnderWay,
}

impl Drop for Calling<'_> {
    fn drop(&mut self) {
        self.background.finish(std::mem::take(&mut self.calls));
    }
}
