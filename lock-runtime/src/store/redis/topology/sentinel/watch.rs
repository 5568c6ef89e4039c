//! Listens for another primary while a connection to the current one is up.
//!
//! In a manual failover the old primary accepts writes for seconds after the new one has begun to,
//! until the Sentinels make it a replica. A client that stays connected to it would hold locks at
//! the same time as clients of the new one. If the old primary has failed silently, this is also
//! the earliest notice.

use std::{future::pending, pin::pin, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use redis::{RedisError, RedisResult, aio::PubSub};
use tokio::{
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{Named, PATIENCE, SentinelAnswer, Sentinels, ask};
use crate::{
    shell::{
        sync::lock,
        time::{Instant, sleep_until},
    },
    store::{
        StoreErrorKind,
        redis::{
            connection::endpoint::{Door, Endpoint},
            error,
            operator::acl::AclLine,
        },
    },
};

const SWITCH: &str = "+switch-master";
/// The pause before another connection to a Sentinel that was lost.
const PAUSE: Duration = Duration::from_secs(2);

impl Sentinels {
    /// Calls `switched` once a Sentinel names a primary other than `current`, of a later
    /// configuration. It runs in a separate task, which the caller ends with the connection
    /// to the primary.
    pub(crate) fn watch(
        self: &Arc<Self>,
        current: Named,
        switched: impl FnOnce() + Send + 'static,
    ) -> AbortHandle {
        let sentinels = self.clone();
        let watching = tokio::spawn(async move {
            let each = sentinels.sentinels.iter();
            let each = each.map(|sentinel| sentinels.successor(&current, sentinel));
            let Some(named) = each.collect::<FuturesUnordered<_>>().next().await else {
                return;
            };
            tracing::info!(primary = %named, before = %current, name = sentinels.name, "the Sentinels name another primary");
            // The next connection queries Sentinels that may not know the new primary yet.
            *lock(&sentinels.heard) = Some((named, Instant::now()));
            switched();
        });
        watching.abort_handle()
    }

    /// The next primary that this Sentinel names.
    async fn successor(&self, current: &Named, sentinel: &Endpoint) -> Named {
        loop {
            if let Some(named) = self.listen(current, sentinel).await {
                return named;
            }
            sleep(PAUSE.mul_f64(0.5 + rand::random::<f64>())).await;
        }
    }

    /// The same on one connection; `None` when that is lost.
    async fn listen(&self, current: &Named, sentinel: &Endpoint) -> Option<Named> {
        let (door, login) = sentinel.door().await.ok()?;
        let mut pubsub = match timeout(PATIENCE, subscribed(&door)).await.ok()? {
            Ok(pubsub) => pubsub,
            // An explicit refusal is final, but for that of a password, which may be replaced.
            Err(cause) if cause.code().is_some() && !is_unauthenticated(&cause) => {
                self.warned.call_once(|| {
                    tracing::warn!(%sentinel, %cause, "a Sentinel sends no notifications of failovers: they are detected when the connection is lost");
                });
                return pending().await;
            }
            Err(_) => return None,
        };
        let mut messages = pubsub.on_message();
        // Another connection takes its place before its credentials end.
        let mut ends = pin!(async {
            match &login {
                Some(login) => sleep_until(login.again_at).await,
                None => pending().await,
            }
        });
        loop {
            // Query after the subscription and after each message, so that nothing is missed and
            // the epoch is known.
            match ask(sentinel, &self.name).await {
                SentinelAnswer::Named(named) if named.replaces(current) => return Some(named),
                SentinelAnswer::Named(_) => {}
                SentinelAnswer::Unknown | SentinelAnswer::Failed(_) => return None,
            }
            let mut message = String::new();
            while !message.starts_with(&format!("{} ", self.name)) {
                let next = tokio::select! {
                    next = messages.next() => next?,
                    () = &mut ends => return None,
                };
                message = next.get_payload().unwrap_or_default();
            }
        }
    }
}

fn is_unauthenticated(cause: &RedisError) -> bool {
    let error = error::disconnected(cause, &AclLine::new("", 0));
    error.kind() == StoreErrorKind::Unauthenticated
}

async fn subscribed(sentinel: &Door) -> RedisResult<PubSub> {
    let mut pubsub = sentinel.listen().await?;
    pubsub.subscribe(SWITCH).await?;
    Ok(pubsub)
}
