"""A browser for the tests: one to start, to look with, and a mouse.

It needs chromium and chromedriver; a test marked `needs_browser` says so and skips without them."""
import contextlib
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import time
from urllib.parse import urlsplit
import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

chromium = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
chromedriver = shutil.which('chromedriver')
needs_browser = pytest.mark.skipif(not (chromium and chromedriver),
    reason='needs chromium and chromedriver: make chromium, or apt-get install chromium chromium-driver')

def chrome(folder):
    "A headless chromium that keeps its profile in `folder` and logs every request."
    opts = webdriver.ChromeOptions()
    opts.binary_location = chromium
    flags = ['headless=new', 'no-sandbox', 'disable-gpu', 'disable-dev-shm-usage', 'disable-quic', 'no-first-run',
        'disable-sync', 'disable-background-networking', 'disable-component-update', 'no-proxy-server',
        'window-size=1100,1000', f'user-data-dir={folder}']
    for flag in flags: opts.add_argument(f'--{flag}')
    opts.set_capability('goog:loggingPrefs', dict(performance='ALL', browser='ALL'))
    driver = webdriver.Chrome(opts, webdriver.ChromeService(chromedriver))
    driver.set_page_load_timeout(60)
    driver.set_script_timeout(120)                            # the longest page, on a machine that does other work too
    return driver

def alive(driver):
    "Does its page still answer?"
    try: return driver.execute_script('return document.readyState') is not None
    except WebDriverException: return False

@contextlib.contextmanager
def screen(browser, page, width=1280, height=900, **more):
    "The file `page` on a screen of this size, in CSS pixels."
    metrics = dict(deviceScaleFactor=1, mobile=False) | dict(width=width, height=height) | more
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
    try:
        visit(browser, page)
        yield
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})

def phone(browser, page): return screen(browser, page, 390, 844, deviceScaleFactor=2, mobile=True)

def hosts(browser):
    "Where the page's requests went since the last call."
    msgs = (json.loads(l['message'])['message'] for l in browser.get_log('performance'))
    urls = (m['params']['request']['url'] for m in msgs if m['method'] == 'Network.requestWillBeSent')
    return {(u.scheme, u.hostname) for u in map(urlsplit, urls) if u.scheme not in ('data', 'blob', 'chrome')}

def errors(browser):
    "What the console has of errors since the last call."
    return [l['message'] for l in browser.get_log('browser') if l['level'] == 'SEVERE']

def visit(browser, page):
    """Open the file `page`; what the last one said is forgotten. All players have unpacked their numbers then: their
    sliders say where they are."""
    for log in ('browser', 'performance'): browser.get_log(log)
    browser.get(page.as_uri())
    ready = """return [...document.querySelectorAll('.shok input[type=range]')].every(
        e => e.hasAttribute('aria-valuetext'))"""
    wait(browser, lambda: browser.execute_script(ready), 'the players to start')

def wait(browser, condition, what, seconds=30):
    return WebDriverWait(browser, seconds, .1).until(lambda _: condition(), f'waited {seconds} s for {what}')

def ask(where, js):
    "At once: a live drawing is replaced whole."
    return where.parent.execute_script('const e = arguments[0]; return '+js, where)

def still(browser, see, what, seconds=.5):
    "What `see()` returns once it has returned the same twice, `seconds` apart; None does not count."
    def same():
        old = see()
        time.sleep(seconds)
        return (old,) if old is not None and see() == old else None
    return wait(browser, same, what)[0]

_AT = """(() => { e.scrollIntoView({block: "center", behavior: "instant"}); const r = e.getBoundingClientRect(),
    hit = document.elementFromPoint(r.x+r.width/2, r.y+r.height/2); return e.contains(hit) ? [r.x, r.y] : null })()"""

def drag(browser, handle, dx, seconds=.5):
    "Drag by `dx` pixels what lies at the middle of `handle`, once it is in view and rests for `seconds`."
    still(browser, lambda: ask(handle, _AT), 'the handle to rest in view', seconds)
    mouse = ActionChains(browser, int(seconds*500)).click_and_hold(handle)
    for part in (dx//2, dx-dx//2): mouse.move_by_offset(part, 0)
    mouse.release().perform()

def find(where, css): return where.find_element(By.CSS_SELECTOR, css)
def every(where, css): return where.find_elements(By.CSS_SELECTOR, css)
def picture(svg):
    "The pixels of one element, in grey."
    ask(svg, 'e.scrollIntoView({block: "center", behavior: "instant"})')
    return np.asarray(Image.open(io.BytesIO(svg.screenshot_as_png)).convert('L'), dtype=int)
def shot(where): return picture(find(where, 'svg'))
def moved(a, b): return (abs(a-b) > 60).sum()

AXE = '4.14.1','e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745'     # and its archive's sha256

def axe(folder):
    "The source of axe-core, kept in `folder`: npm brings it once. Skips where it cannot."
    version,digest = AXE
    archive = folder/f'axe-core-{version}.tgz'
    if not archive.exists():
        if not (npm := shutil.which('npm')): pytest.skip('needs npm, for axe-core')
        folder.mkdir(parents=True, exist_ok=True)
        command = [npm, 'pack', f'axe-core@{version}', '--silent', '--fetch-retries=1', '--fetch-timeout=20000']
        try: run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
        except subprocess.TimeoutExpired: pytest.skip('npm reaches no registry for axe-core: no answer in 90 s')
        if run.returncode: pytest.skip(f'npm reaches no registry for axe-core: {run.stderr.strip()[-200:]}')
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == digest, f'{archive} is not axe-core {version}: remove it'
    with tarfile.open(archive) as tar: return tar.extractfile('package/axe.min.js').read().decode()
