//! Calls to the members of a cluster: one of them at a time, and the next one when it fails.

use std::{
    mem::forget,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use prost::Message;
use tokio::{runtime::Handle, sync::Mutex as Queue};
use tonic::{
    Request, Status,
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{
    error,
    messages::{AUTHENTICATE, AuthenticateRequest, AuthenticateResponse},
    settings::Target,
};
use crate::{
    client::credentials::Provider,
    shell::{sync::lock, time::Instant},
    store::{StoreError, StoreErrorKind},
};

/// A call that was given up after this time counts against its member. Shorter than a call waits
/// for the shortest lease.
const SLOW: Duration = Duration::from_millis(120);

/// The longest reply: a page of large records.
const REPLY: usize = 64 << 20;

/// The age from which on a connection is replaced after a slow call.
const LASTS: Duration = Duration::from_secs(1);

pub(super) struct Members {
    members: Vec<Member>,
    current: AtomicUsize,
    user: Option<String>,
    credentials: Option<Provider>,
    is_anonymous: bool,
    token: Mutex<Option<Token>>,
    /// One call at a time gets a token, as a member checks a password for a tenth of a second.
    login: Queue<()>,
    /// A member has accepted the user.
    was_accepted: AtomicBool,
}

struct Member {
    name: String,
    endpoint: Endpoint,
    /// Its task is on the runtime of the call that has made it, which may end or stand still.
    connection: Mutex<(Channel, Instant)>,
}

impl Member {
    fn new((name, endpoint): &(String, Endpoint)) -> Self {
        Self {
            name: name.clone(),
            endpoint: endpoint.clone(),
            connection: Mutex::new((endpoint.connect_lazy(), Instant::now())),
        }
    }

    fn channel(&self) -> Channel {
        lock(&self.connection).0.clone()
    }

    /// Makes a connection on this runtime in place of one that is older than that.
    fn reconnect(&self, age: Duration) -> Channel {
        let mut connection = lock(&self.connection);
        if Instant::now() >= connection.1 + age && Handle::try_current().is_ok() {
            *connection = (self.endpoint.connect_lazy(), Instant::now());
        }
        connection.0.clone()
    }
}

/// A token of the user.
#[derive(Clone)]
struct Token {
    value: MetadataValue<Ascii>,
    number: u64,
    /// When the credentials end by which it was given out.
    until: Option<Instant>,
}

/// A call in flight. If it is dropped before its reply, and was slow, the next member serves.
struct Patience<'a>(&'a Members, usize, Instant);

impl Drop for Patience<'_> {
    fn drop(&mut self) {
        if Instant::now() >= self.2 + SLOW {
            self.0.leave(self.1);
            self.0.members[self.1].reconnect(LASTS);
        }
    }
}

impl Members {
    /// Connects with the first call. Within a runtime of Tokio.
    pub(super) fn new(target: &Target) -> Self {
        let members: Vec<_> = target.members.iter().map(Member::new).collect();
        Self {
            // The clients of a fleet begin with different members.
            current: AtomicUsize::new(rand::random_range(0..members.len())),
            members,
            user: target.user.clone(),
            credentials: target.credentials.clone(),
            is_anonymous: target.is_anonymous,
            token: Mutex::default(),
            login: Queue::default(),
            was_accepted: AtomicBool::new(false),
        }
    }

    /// Turns from this member to the next one, unless another call has done so.
    pub(super) fn leave(&self, index: usize) {
        let next = (index + 1) % self.members.len();
        let order = Ordering::Relaxed;
        let _ = self.current.compare_exchange(index, next, order, order);
    }

    pub(super) fn count(&self) -> usize {
        self.members.len()
    }

    pub(super) fn name(&self, index: usize) -> &str {
        &self.members[index].name
    }

    /// The number of the member that serves calls at present.
    pub(super) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed)
    }

    /// Returns a connection to a member that takes a call now.
    pub(super) async fn grpc(&self, index: usize) -> Result<Grpc<Channel>, Status> {
        let member = &self.members[index];
        let client = |channel| Grpc::new(channel).max_decoding_message_size(REPLY);
        let mut grpc = client(member.channel());
        if grpc.ready().await.is_ok() {
            return Ok(grpc);
        }
        // Its task has ended, with the runtime.
        let mut grpc = client(member.reconnect(Duration::ZERO));
        let ready = grpc.ready().await;
        ready.map_err(|error| Status::from_error(Box::new(error)))?;
        Ok(grpc)
    }

    /// Returns a request with the token of the user. A member that knows no leader refuses it at
    /// once if it `needs_leader`.
    pub(super) fn request<T>(&self, message: T, needs_leader: bool) -> Request<T> {
        let mut request = Request::new(message);
        let metadata = request.metadata_mut();
        if needs_leader {
            metadata.insert("hasleader", MetadataValue::from_static("true"));
        }
        if let Some(Token { value, .. }) = lock(&self.token).clone() {
            metadata.insert("token", value);
        }
        request
    }

    /// Makes a call to one member.
    async fn call_member<Q, A>(
        &self,
        index: usize,
        path: &'static str,
        request: Request<Q>,
    ) -> Result<A, Status>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let patience = Patience(self, index, Instant::now());
        let reply = async {
            let mut grpc = self.grpc(index).await?;
            let path = PathAndQuery::from_static(path);
            let codec = ProstCodec::<Q, A>::default();
            grpc.unary(request, path, codec).await
        };
        let reply = reply.await;
        forget(patience);
        reply.map(tonic::Response::into_inner)
    }

    /// Makes a call, with the token of the user. It is repeated only if it was refused because of
    /// the token.
    ///
    /// # Cancellation
    /// If the future of a slow call is dropped, the next call goes to another member.
    pub(super) async fn call<Q, A>(&self, path: &'static str, message: Q) -> Result<A, StoreError>
    where
        Q: Message + Clone + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.authenticate(None).await?;
        let (index, token) = (self.current(), self.token());
        let make = || self.call_member(index, path, self.request(message.clone(), true));
        let mut reply = make().await;
        if let Err(status) = &reply
            && token.is_some()
            && error::is_token_refused(status)
        {
            self.authenticate(token).await?;
            reply = make().await;
        }
        reply.map_err(|status| self.failed(index, &status))
    }

    /// Makes a call to one member, for its health.
    pub(super) async fn ask<Q, A>(
        &self,
        index: usize,
        path: &'static str,
        message: Q,
    ) -> Result<A, StoreError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.authenticate(None).await?;
        let request = self.request(message, false);
        let reply = self.call_member(index, path, request).await;
        reply.map_err(|status| error::of_call(self.name(index), &status))
    }

    /// The number of the present token.
    pub(super) fn token(&self) -> Option<u64> {
        lock(&self.token).as_ref().map(|token| token.number)
    }

    /// Gets a token for the user, if there is one, unless there is a token that was not `refused`.
    pub(super) async fn authenticate(&self, refused: Option<u64>) -> Result<(), StoreError> {
        let Some(credentials) = &self.credentials else {
            return Ok(());
        };
        let is_valid = |token: &Token| {
            let lasts = token.until.is_none_or(|until| Instant::now() < until);
            lasts && Some(token.number) != refused
        };
        let has_token = || lock(&self.token).as_ref().is_some_and(is_valid);
        if has_token() {
            return Ok(());
        }
        let _turn = self.login.lock().await;
        if has_token() {
            return Ok(());
        }
        let credentials = credentials.credentials().await;
        let credentials = credentials.map_err(|error| error.with_unsent(true))?;
        let until = credentials.again_at();
        // A member refuses a call with a token that has ended, also this one.
        *lock(&self.token) = None;
        let request = AuthenticateRequest {
            name: (credentials.user.or_else(|| self.user.clone())).unwrap_or_default(),
            password: credentials.password,
        };
        // Another one may serve since this call began to wait.
        let index = self.current();
        let request = self.request(request, true);
        let reply = self.call_member::<_, AuthenticateResponse>(index, AUTHENTICATE, request);
        let reply = reply.await;
        let reply = reply.map_err(|status| self.failed(index, &status).with_unsent(true))?;
        self.was_accepted.store(true, Ordering::Relaxed);
        let number = rand::random();
        let value = reply.token.parse().ok();
        *lock(&self.token) = value.map(|value| Token {
            value,
            number,
            until,
        });
        Ok(())
    }

    /// Returns the error of a call, after which the next member may serve.
    pub(super) fn failed(&self, index: usize, status: &Status) -> StoreError {
        if error::is_of_member(status) {
            self.leave(index);
        }
        let error = error::of_call(self.name(index), status);
        // The password of a user that was accepted before is being replaced.
        let is_refused = error.kind() == StoreErrorKind::Unauthenticated;
        let error = error.passing(is_refused && self.was_accepted.load(Ordering::Relaxed));
        let may_lack_certificate = self.is_anonymous && error::was_closed(status);
        match may_lack_certificate {
            true => {
                let text = format!("{error}; the member may require a certificate of the client");
                StoreError::new(error.kind(), text).with_unsent(error.is_unsent())
            }
            false => error,
        }
    }
}
