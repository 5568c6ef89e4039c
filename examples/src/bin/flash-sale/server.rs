//! A server process: opens the shop, sells until it is stopped, and reports the result.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    process::ExitCode,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context;
use axum::serve::ListenerExt;
use lock_examples::{parent_hangs_up, run_id, say, stopped};
use lock_runtime::{LockClient, LockClientBuilder};
use lock_tower::inspector::Inspector;
use tokio::{net::TcpListener, net::TcpSocket, time::timeout};

#[cfg(feature = "observed")]
use crate::observed;
use crate::{
    ITEM, files,
    options::Options,
    shop::{Shop, routes},
    stock::{Stock, lock_namespace},
};

/// The number of connections that may wait to be accepted.
const BACKLOG: u32 = 4096;
/// The time that requests in flight have to finish after a stop.
const FAREWELL: Duration = Duration::from_secs(10);

/// The time without an answer of the store after which customers are turned away.
const AWAY: Duration = Duration::from_secs(2);

/// The result of one server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// The number of its sales.
    pub(crate) sold: u64,
    /// The number of pieces left in its stock.
    pub(crate) left: u64,
    /// Locks in its store that were not released.
    pub(crate) leftover_keys: u64,
}

/// Sells on behalf of the parent process until the parent closes the input.
pub(crate) async fn serve_parent(options: &Options, run: &str) -> anyhow::Result<ExitCode> {
    let server = Server::open(options, run).await?;
    if let Stock::Memory(_) = server.shop.stock {
        // A shared stock is already filled.
        server.shop.stock.write(ITEM, options.stock).await?;
    }
    let listener = listen((Ipv4Addr::LOCALHOST, 0).into())?;
    say(listener.local_addr()?);
    let account = server.sell(listener, parent_hangs_up()).await?;
    say(account);
    Ok(ExitCode::SUCCESS)
}

/// Sells to all clients at `address`, until Ctrl-C.
pub(crate) async fn serve_public(
    options: &Options,
    address: SocketAddr,
) -> anyhow::Result<ExitCode> {
    let stop = stopped()?;
    let run = run_id("flash-sale");
    let listener = listen(address)?;
    let address = listener.local_addr()?;
    let files = files::raise();
    let server = Server::open(options, &run).await?;
    let stock = server.shop.stock.clone();
    stock.fill(ITEM, options.stock).await?;
    let store = options.place()?;
    let how = if options.no_lock {
        "without a lock: expect overselling"
    } else {
        "under the lock stock:{item}"
    };
    println!(
        "flash-sale sells {} pieces, kept {store}, {how}; at most {files} open files.\n\n  \
         curl -X POST http://{address}/buy/{ITEM}         buys one\n  \
         curl http://{address}/stock/{ITEM}               shows how many are left\n  \
         http://{address}/locks                   in a browser: who holds the lock, and who waits\n  \
         oha -m POST -n {} -c {} http://{address}/buy/{ITEM}\n\n\
         200 is sold, 410 is sold out, anything else is an error. Ctrl-C ends the sale.",
        options.stock, options.requests, options.concurrency,
    );
    if let Stock::Memory(_) = stock {
        return Ok(conclude(options, server.sell(listener, stop).await?));
    }
    let sold = server.sell(listener, stop).await;
    let leftover_keys = stock.leftover_locks().await;
    stock.clear(ITEM).await?;
    let leftover_keys = leftover_keys?;
    Ok(conclude(
        options,
        Account {
            leftover_keys,
            ..sold?
        },
    ))
}

fn conclude(options: &Options, account: Account) -> ExitCode {
    let oversold = account.sold.saturating_sub(options.stock);
    println!(
        "sold={} oversold={oversold} left={} leftover_keys={}",
        account.sold, account.left, account.leftover_keys
    );
    let failed = account.leftover_keys > 0 || (oversold > 0 && !options.no_lock);
    if failed {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

/// A client whose wait queues can hold all customers at once.
pub(crate) fn lock_client(options: &Options, run: &str) -> LockClientBuilder {
    let customers = usize::try_from(options.concurrency).unwrap_or(usize::MAX);
    LockClient::builder()
        .namespace(lock_namespace(run))
        .unavailable_after(AWAY)
        .max_waiters(customers.max(10_000))
}

fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listen = || {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    listen().with_context(|| format!("cannot serve at {address}"))
}

struct Server {
    shop: Shop,
    locks: LockClient,
    #[cfg(feature = "observed")]
    metrics: metrics_exporter_prometheus::PrometheusHandle,
}

impl Server {
    async fn open(options: &Options, run: &str) -> anyhow::Result<Self> {
        #[cfg(feature = "observed")]
        let metrics = observed::observe()?;
        let builder = lock_client(options, run);
        let locks = match options.url() {
            Some(url) => builder.connect(url).await?,
            None => builder.build_in_memory()?,
        };
        let shop = Shop {
            stock: Stock::connect(options, run).await?,
            locks: (!options.no_lock).then(|| locks.clone()),
            sold: Arc::new(AtomicU64::new(0)),
        };
        Ok(Self {
            shop,
            locks,
            #[cfg(feature = "observed")]
            metrics,
        })
    }

    async fn sell(
        self,
        listener: TcpListener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> anyhow::Result<Account> {
        // In production, behind a middleware that admits operators only.
        let origin = format!("http://{}", listener.local_addr()?);
        let inspector = Inspector::new(self.locks.clone()).allow_revoke(&origin);
        let app = routes(self.shop.clone()).nest_service("/locks", inspector);
        #[cfg(feature = "observed")]
        let app = app.merge(observed::routes(self.metrics, &self.locks));
        let Self { shop, locks, .. } = self;
        let (stopped, stopping) = tokio::sync::oneshot::channel();
        let stop = async {
            stop.await;
            // The receiver is gone if serving has failed in the meantime.
            let _ = stopped.send(());
        };
        // A small response must not wait for the acknowledgement of the previous one. A
        // connection that rejects this option is already dead.
        let listener = listener.tap_io(|connection| drop(connection.set_nodelay(true)));
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        let serving = axum::serve(listener, app).with_graceful_shutdown(stop);
        let serving = tokio::spawn(serving.into_future());
        // An error means that the sender was dropped: serving has failed, and its error follows.
        let _ = stopping.await;
        match timeout(FAREWELL, serving).await {
            Ok(served) => served??,
            Err(_) => eprintln!(
                "flash-sale: requests are still in flight after {FAREWELL:?}; abandoning them"
            ),
        }
        locks.shutdown().await;
        let held = locks.inspect(format!("stock:{ITEM}")).await?;
        Ok(Account {
            sold: shop.sold.load(Ordering::Relaxed),
            left: shop.stock.left(ITEM).await?.unwrap_or(0),
            leftover_keys: held.holders.len() as u64,
        })
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.sold, self.left, self.leftover_keys)
    }
}

impl FromStr for Account {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let numbers: Vec<u64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        let [sold, left, leftover_keys] = numbers[..] else {
            anyhow::bail!("{text:?} is not an account of a sale")
        };
        Ok(Self {
            sold,
            left,
            leftover_keys,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_read_as_it_was_written() {
        let account = Account {
            sold: 3,
            left: 7,
            leftover_keys: 1,
        };
        assert_eq!(account.to_string().parse::<Account>().unwrap(), account);
        assert!("3 7".parse::<Account>().is_err());
    }
}
