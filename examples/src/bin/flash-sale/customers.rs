//! The crowd: customers with one connection each, and a fixed number of attempts to buy.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Context;
use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use hdrhistogram::Histogram;
use http_body_util::{BodyExt, Empty};
use hyper::{
    Request, StatusCode,
    client::conn::http1::{SendRequest, handshake},
    header::HOST,
};
use hyper_util::rt::TokioIo;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::{net::TcpStream, task::JoinSet, time::timeout};

use crate::ITEM;

/// The number of connections that are opened at the same time: fewer than the backlog of a
/// listener, so that none has to be retried.
const CONNECTING: usize = 128;
/// Longer than the server lets a request wait for the lock, so a response that takes longer will
/// not come.
const PATIENCE: Duration = Duration::from_secs(90);

/// The results of all attempts, as seen by the customers.
#[derive(Debug)]
pub(crate) struct Experience {
    pub(crate) sold: u64,
    pub(crate) sold_out: u64,
    /// All other responses by kind: their number, and the first one in full.
    pub(crate) errors: BTreeMap<String, (u64, String)>,
    /// The response times, in µs.
    pub(crate) waits: Histogram<u64>,
    pub(crate) elapsed: Duration,
}

impl Experience {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let longest = u64::try_from(PATIENCE.as_micros())?;
        let waits = Histogram::new_with_max(longest, 3)?;
        Ok(Self {
            sold: 0,
            sold_out: 0,
            errors: BTreeMap::new(),
            waits,
            elapsed: Duration::ZERO,
        })
    }

    fn add(&mut self, Try { answer, waited }: Try) {
        self.waits
            .saturating_record(u64::try_from(waited.as_micros()).unwrap_or(u64::MAX));
        match answer {
            Answer::Sold => self.sold += 1,
            Answer::SoldOut => self.sold_out += 1,
            Answer::Error { kind, message } => {
                self.errors.entry(kind).or_insert((0, message)).0 += 1
            }
        }
    }

    pub(crate) fn errors(&self) -> u64 {
        self.errors.values().map(|(count, _)| count).sum()
    }
}

/// One attempt to buy.
struct Try {
    answer: Answer,
    waited: Duration,
}

enum Answer {
    Sold,
    SoldOut,
    Error { kind: String, message: String },
}

/// Connects `customers`, spread evenly over the servers, and makes `requests` attempts in total.
///
/// # Errors
/// If the servers cannot be connected to, before the first request.
pub(crate) async fn storm(
    servers: &[SocketAddr],
    customers: u64,
    requests: u64,
) -> anyhow::Result<Experience> {
    let customers: Vec<_> = stream::iter((0..customers).zip(servers.iter().cycle()))
        .map(|(_, server)| Customer::connect(*server))
        .buffer_unordered(CONNECTING)
        .try_collect()
        .await?;
    let bar = ProgressBar::new(requests).with_style(ProgressStyle::with_template(
        "{bar:40} {human_pos}/{human_len} answered, {per_sec}, {eta} left",
    )?);

    // Each customer makes a fixed share of the attempts, so that faster customers do not take all
    // of them, and every server gets requests.
    let (share, rest) = (
        requests / customers.len() as u64,
        requests % customers.len() as u64,
    );
    let started = Instant::now();
    let mut crowd = JoinSet::new();
    for (customer, number) in customers.into_iter().zip(0..) {
        crowd.spawn(customer.shop(share + u64::from(number < rest), bar.clone()));
    }
    let mut experience = Experience::new()?;
    while let Some(tries) = crowd.join_next().await {
        tries
            .context("a customer task panicked")?
            .into_iter()
            .for_each(|attempt| experience.add(attempt));
    }
    experience.elapsed = started.elapsed();
    bar.finish_and_clear();
    Ok(experience)
}

/// A customer with a keep-alive connection.
struct Customer {
    server: SocketAddr,
    line: SendRequest<Empty<Bytes>>,
}

impl Customer {
    async fn connect(server: SocketAddr) -> anyhow::Result<Self> {
        let line = connect(server)
            .await
            .with_context(|| format!("cannot connect to the server at {server}"))?;
        Ok(Self { server, line })
    }

    async fn shop(mut self, tries: u64, bar: ProgressBar) -> Vec<Try> {
        let mut had = Vec::new();
        for _ in 0..tries {
            let since = Instant::now();
            let answer = match timeout(PATIENCE, self.buy()).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(error)) => Answer::Error {
                    kind: "transport".into(),
                    message: format!("{error:#}"),
                },
                Err(_) => Answer::Error {
                    kind: "no_answer".into(),
                    message: format!("none within {PATIENCE:?}"),
                },
            };
            had.push(Try {
                answer,
                waited: since.elapsed(),
            });
            bar.inc(1);
        }
        had
    }

    async fn buy(&mut self) -> anyhow::Result<Answer> {
        // A missing response leaves the connection unusable.
        if self.line.ready().await.is_err() {
            self.line = connect(self.server).await?;
        }
        let request = Request::post(format!("/buy/{ITEM}"))
            .header(HOST, self.server.to_string())
            .body(Empty::new())?;
        let response = self.line.send_request(request).await?;
        let status = response.status();
        let body = response.into_body().collect().await?.to_bytes();
        Ok(match status {
            StatusCode::OK => Answer::Sold,
            StatusCode::GONE => Answer::SoldOut,
            _ => {
                let message = String::from_utf8_lossy(&body).trim().to_owned();
                let kind = message
                    .split_once(':')
                    .map_or_else(|| status.to_string(), |(kind, _)| kind.to_owned());
                Answer::Error { kind, message }
            }
        })
    }
}

async fn connect(server: SocketAddr) -> anyhow::Result<SendRequest<Empty<Bytes>>> {
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let (line, connection) = handshake(TokioIo::new(stream)).await?;
    // An error of the connection appears at the next request.
    tokio::spawn(async { drop(connection.await) });
    Ok(line)
}
